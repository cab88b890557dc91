"""States in fewer bits: how numbers become codes, and the stores that remember codes in place of rows."""
