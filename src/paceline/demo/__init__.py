"""The two demo models that come with paceline; MODEL_CARD.md describes them."""
