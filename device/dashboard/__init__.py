"""The privacy dashboard: what measurement has cost a person, on a page that only they can open.

- `pages`: the pages, from one overview of the device
- `totals`: what each site and each intermediary has had
- `words`: plain words for a device's numbers
- `confirmation`: what the person can do there, each with a page that asks
- `markup`: HTML in which no site's name can become part of the page
- `layout`: the frame around every page
- `server`: routes and answers
- `guard`: who may talk to a page on this machine
- `serve`: serving until it is stopped
- `command`: `trefoil device dashboard`
"""
