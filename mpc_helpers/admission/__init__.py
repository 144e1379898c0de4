"""Admit: which reports of a batch one helper will count, and their sum."""
