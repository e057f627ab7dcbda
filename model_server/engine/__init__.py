"""The engine's step loop: scheduler, requests, results."""
