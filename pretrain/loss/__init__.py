"""The training loss: a fused linear cross-entropy and the sums that it gives."""
