"""Which rank holds what: the units, pages and shards of a model, the stages of a pipe, the chunks of a batch."""
