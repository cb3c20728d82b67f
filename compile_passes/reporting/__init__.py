"""What the pass did, for people: tables, log lines, pictures."""
