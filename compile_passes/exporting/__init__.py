"""``export_step``: a rewritten step for runtimes without Python."""
