"""Patches for trainers. Each trainer line is one module, with the four
functions of `protocol.TrainerLine`.
"""
