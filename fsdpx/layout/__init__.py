"""Who holds what: ranges, pages, units and the train state of a rank."""
