"""The program: flags and files in, all parts made and joined, ports opened; debug pages."""
