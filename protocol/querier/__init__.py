"""The querier: asks three helpers, keeps what she asked, and says what an answer is worth."""
