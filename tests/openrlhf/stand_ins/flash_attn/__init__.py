"""What OpenRLHF imports of flash-attn at its own import: index arithmetic, by its definition. No attention."""
