"""Whether an installed version of a package is patched: its version, and the code that a line relies on."""
