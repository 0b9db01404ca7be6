"""One module a trainer line: where it is entered, what guards the entry, and what takes its place."""
