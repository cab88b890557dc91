"""An HTTP server for the services of attn-gateway: OpenAI's interface, and every gRPC call as JSON over HTTP."""
