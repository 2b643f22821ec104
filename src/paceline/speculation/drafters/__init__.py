"""The drafters that come with the package."""
