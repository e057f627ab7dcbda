"""Fields and units of flags and files, the picker's file, named resources."""
