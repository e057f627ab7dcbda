"""Wiring of the program: flags and files to joined parts and open ports; debug pages."""
