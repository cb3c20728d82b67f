"""What was replaced and what replaces it, compared on random inputs in float64."""
