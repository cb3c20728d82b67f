"""A speculative window recognised in what was read, or the reason why not. Edits nothing."""
