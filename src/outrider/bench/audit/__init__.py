"""The audit: is this method lossless on this model and machine? It uses proofs where possible, and otherwise tests with a
stated error rate.
"""
