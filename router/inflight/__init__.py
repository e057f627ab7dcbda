"""Requests in flight: dispatches, the ledger of pods' work, learned prefill rates."""
