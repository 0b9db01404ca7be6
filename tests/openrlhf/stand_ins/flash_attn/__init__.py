"""The index arithmetic of flash-attn that OpenRLHF needs in order to be imported. It has no attention."""
