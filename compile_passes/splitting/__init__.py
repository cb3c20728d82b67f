"""``split_step``: both halves of a step whose acceptance is decided outside of any graph."""
