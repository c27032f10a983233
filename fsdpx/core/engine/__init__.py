"""The engine: it runs programs (lists of actions such as "forward of unit 3") on one rank and reports events to
observers."""
