"""What the record of a run says: figures, words, a trace and a page."""
