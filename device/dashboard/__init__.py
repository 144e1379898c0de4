"""The privacy dashboard: what measurement has cost a person, on a page that only they can open."""
