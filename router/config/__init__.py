"""What flags and files may say: fields and units, the picker's file, named resources."""
