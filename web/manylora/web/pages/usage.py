"""`/admin/usage`: the newest rows and the sums over all of them, by tenant and adapter."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from manylora.platform.adapters import list_adapters
from manylora.platform.api.auth import services_of
from manylora.platform.tenants import find_tenant, list_tenants
from manylora.platform.usage import recent
from manylora.web.figures import tokens_by_hour, totals
from manylora.web.page_route import PageRoute
from manylora.web.templating import render

router = APIRouter(route_class=PageRoute)

SHOWN_ROWS = 100


@router.get("/admin/usage")
def usage(request: Request) -> Response:
    slug = request.query_params.get("tenant", "")
    adapter = request.query_params.get("adapter", "").strip().replace("\0", "") or None
    with services_of(request).db.read() as session:
        tenant = find_tenant(session, slug) if slug else None
        tenant_id = tenant.id if tenant else ("" if slug else None)  # an unknown one has no rows
        names = {view.adapter.name for view in list_adapters(session, tenant_id)}
        values = {
            "tenants": list_tenants(session),
            "tenant": slug,
            "adapter": adapter or "",
            "adapters": sorted(names),
            "lines": recent(session, tenant_id=tenant_id, adapter=adapter, limit=SHOWN_ROWS),
            "totals": totals(session, tenant_id=tenant_id, adapter=adapter),
            "hours": tokens_by_hour(session, tenant_id=tenant_id, adapter=adapter),
            "shown": SHOWN_ROWS,
        }
    return render(request, "usage.html", values)
