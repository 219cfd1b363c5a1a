"""A FastAPI server answers in its pool of threads, and keeps each request with its answer for an audit."""
import http.client
import json
import subprocess
import sys
import time

PORT, REQUESTS = 8391, 420


def client():
    """Runs in a process of its own."""
    body = json.dumps({"features": [0.5] * 64})
    headers = {"Content-Type": "application/json"}
    for _ in range(300):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", PORT)
            connection.request("GET", "/health")
            connection.getresponse().read()
            break
        except OSError:
            time.sleep(0.1)
    for _ in range(REQUESTS):
        connection.request("POST", "/predict", body, headers)
        connection.getresponse().read()
        time.sleep(0.008)
    connection.request("POST", "/stop")
    connection.getresponse().read()


def main():
    import fastapi
    import pydantic
    import torch
    import uvicorn
    from torch import nn

    class Query(pydantic.BaseModel):
        features: list[float]

    app = fastapi.FastAPI()
    app.state.audit = []
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4096)).eval()

    @app.get("/health")
    def health():
        return {"answers": len(app.state.audit)}

    @app.post("/predict")
    def predict(query: Query):
        with torch.inference_mode():
            out = model(torch.tensor(query.features))
        app.state.audit.append((query, out))
        time.sleep(0.002)
        return {"best": int(out.argmax())}

    @app.post("/stop")
    def stop():
        server.should_exit = True
        return {}

    server = uvicorn.Server(uvicorn.Config(app, port=PORT, log_level="warning"))
    users = subprocess.Popen([sys.executable, __file__, "--client"])
    server.run()
    users.wait()
    print("done", REQUESTS)


if __name__ == "__main__":
    client() if "--client" in sys.argv else main()
# mypy: ignore-errors
