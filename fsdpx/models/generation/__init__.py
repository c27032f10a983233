"""Text from a model, token by token: which token comes next, and when a text ends. Pure arrays, no communication."""
