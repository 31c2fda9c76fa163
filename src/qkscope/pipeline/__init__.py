"""The thin orchestrator: ties study, documents, capture, moments and analysis together and writes the results."""
