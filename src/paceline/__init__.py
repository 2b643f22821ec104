"""paceline."""
