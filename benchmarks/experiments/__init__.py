"""The paper's evaluation: many devices simulated in columns, three accounting policies, every figure."""
