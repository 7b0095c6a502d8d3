"""Weights for models on one device or many: read where they are kept, sent where they are needed."""

from dpzoo.pretrained.load import load_pretrained as load_pretrained
