"""The privacy dashboard: what measurement has cost a person, on pages that only their browser can open.

- `server`: routes, login, and serving until stopped
- `pages`: the overview page, with totals by site and by intermediary, and each action with its confirmation page
- `formatting`: a device's numbers as text for its person
- `markup`: HTML from Python values, and the page template
- `security`: loopback binding, Host and Origin checks, CSP, session cookie and CSRF token
"""
