"""Feeders as actors of a Ray cluster. Nothing else imports ray; `node` alone does without it, too."""
