"""Wire format of events: published bytes to columns."""
