"""Commands: requests to an application, decided on the events inside a boundary, and stored under guards."""
