"""A recognised window exchanged for verify, commit and recover."""
