"""Length tasks: generated examples, with a length that is drawn or chosen."""
