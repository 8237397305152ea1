"""EAGLE drafts: from any format to one EagleConfig."""
