"""What nodes of an FX graph say, read element by element. Knows nothing of any recurrence."""
