"""Drafts: from any format to one EagleConfig or BlockConfig."""
