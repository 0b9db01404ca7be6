"""The index functions of flash-attn that OpenRLHF needs to be imported. It has no attention."""
