"""Make it happen: the interpreter of programs and the trainer around it."""
