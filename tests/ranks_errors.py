"""Bad arguments with a group: they raise on every rank, and none is left waiting."""
