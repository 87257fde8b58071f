"""Feeders as actors of a Ray cluster. Nothing else imports ray; `raynode` alone does without it, too."""
