"""The interpreter of programs, the operations of their verbs, and observers."""
