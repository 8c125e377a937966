"""What a recipe does at which moment, and what it has under way."""
