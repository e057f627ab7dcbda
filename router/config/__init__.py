"""Parsing of flags and YAML files, the EndpointPickerConfig and the resources file."""
