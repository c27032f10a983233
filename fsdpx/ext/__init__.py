"""Extensions: each folder is one feature, and the core imports none of them."""
