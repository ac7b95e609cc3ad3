"""A page that forecasts in the browser: model, engine and scripts in one folder, no server."""
