"""Scripts that measure; not tests, and not part of the package."""
