"""A speech server: each client opens a session, sends a chunk of sound and leaves; its state is never dropped."""
import http.client
import subprocess
import sys
import uuid

import numpy as np
import torch
from torch import nn

PORT, REQUESTS = 8377, 600


def client():
    """Runs in a process of its own."""
    import time
    chunk = np.zeros(16000, np.float32).tobytes()
    for _ in range(200):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", PORT)
            connection.request("GET", "/health")
            connection.getresponse().read()
            break
        except OSError:
            time.sleep(0.1)
    for _ in range(REQUESTS):
        connection.request("POST", f"/stream/{uuid.uuid4().hex}", body=chunk)
        connection.getresponse().read()
        time.sleep(0.01)
    connection.request("POST", "/stop")
    connection.getresponse().read()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.frames, self.rnn = nn.Conv1d(1, 128, 400, 320), nn.GRU(128, 256, 2, batch_first=True)

    def forward(self, sound, hidden):
        out, hidden = self.rnn(torch.relu(self.frames(sound)).transpose(1, 2), hidden)
        return out.mean(1), hidden


def create_app():
    from fastapi import FastAPI, Request
    from fastapi.concurrency import run_in_threadpool
    app = FastAPI()
    model = Encoder().eval()
    session_state = {}

    def infer(session, body):
        state = session_state.setdefault(session, {"hidden": None, "sound": None})
        state["sound"] = np.frombuffer(body, np.float32).copy()
        with torch.inference_mode():
            out, state["hidden"] = model(torch.from_numpy(state["sound"])[None, None], state["hidden"])
        return out.norm().item()

    @app.get("/health")
    async def health():
        return {"sessions": len(session_state)}

    @app.post("/stream/{session}")
    async def stream(session: str, request: Request):
        return {"score": await run_in_threadpool(infer, session, await request.body())}

    @app.post("/stop")
    async def stop():
        app.state.server.should_exit = True
        return {"sessions": len(session_state)}

    return app


def main():
    import uvicorn
    app = create_app()
    app.state.server = uvicorn.Server(uvicorn.Config(app, port=PORT, log_level="warning"))
    users = subprocess.Popen([sys.executable, __file__, "--client"])
    app.state.server.run()
    users.wait()


if __name__ == "__main__":
    client() if "--client" in sys.argv else main()
# mypy: ignore-errors
